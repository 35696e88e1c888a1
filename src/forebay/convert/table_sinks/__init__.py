"""Writers of tables, one file a family of formats."""
