"""The stages that clean text: `Unicode`, `Pii`, `Toxic`, `Boilerplate`.

Hides: nothing; each is in its own file, and is imported from there so that a recipe pays for what it names.
"""
