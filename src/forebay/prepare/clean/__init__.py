"""Stages that clean text: `Extract`, `Unicode`, `Pii`, `Toxic`, `Boilerplate`, each in a module of its own."""
