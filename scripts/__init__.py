"""Commands, benches and the replay simulator: roots of the import graph, imported by nothing but tests."""
