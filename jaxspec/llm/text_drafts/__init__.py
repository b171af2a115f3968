"""Drafts of text: from a draft model with any tokenizer, or from another server."""
