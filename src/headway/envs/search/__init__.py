"""Research in documents: a local index, tools to read it, questions that follow the documents' own references."""
