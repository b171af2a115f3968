"""How models write calls of tools: a table of formats, the grammar of each, and a parser."""
