"""RL trainers of others, whose rollouts an engine generates. A module for each library; none is
imported by the rest of jaxspec."""
