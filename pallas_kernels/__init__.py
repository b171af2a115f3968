"""Array operations with a jnp reference each. Knows arrays, not engines; never imports jaxspec."""
