"""Files of prompts to files of completions: JSON lines in, JSON lines out, going on after a kill where it was."""
