"""The round (draft, verify, accept, commit), the loop around it, and what it counts."""
