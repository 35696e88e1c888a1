"""Figures, not tests: each module measures one claim beside a bare yardstick, in the same run."""
