"""Array operations, each with a jnp reference. This package never imports jaxspec."""
