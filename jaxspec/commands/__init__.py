"""The commands of the command line, a file each; ``jaxspec.__main__`` has their table."""
