"""Which documents are copies of others: exact, by paragraph or line, and near ones by MinHash."""
