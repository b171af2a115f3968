"""The commands `jaxspec bench ...`."""
