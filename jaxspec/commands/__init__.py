"""The commands of the command line, one file each; ``jaxspec.__main__`` lists them."""
