"""What several commands share: options, meshes, tables, run facts."""
