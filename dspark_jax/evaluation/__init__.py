"""How well a drafter drafts: accepted lengths with their uncertainty, and whether its confidence can be believed."""
