"""A file of prompts to a file of results: resumable, in shards, with bounded memory."""
