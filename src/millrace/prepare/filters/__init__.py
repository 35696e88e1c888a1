"""Rules that say which documents are worth training on; each is a stage."""
