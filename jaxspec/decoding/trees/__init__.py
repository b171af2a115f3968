"""Draft trees: how they are stored, grown and chosen."""
