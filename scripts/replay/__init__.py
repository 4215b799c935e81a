"""How long to keep an idle GPU: replays request traces against startup times and retention policies."""
