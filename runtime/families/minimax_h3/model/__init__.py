"""Numerical code of MiniMax-H3. Imports torch at the top; imported only after the startup graph's torch node."""
