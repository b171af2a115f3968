"""Host-side planning: requests and how they are batched. Knows no jax."""
