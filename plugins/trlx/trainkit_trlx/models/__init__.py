"""Models, heads and the settings of PPO and ILQL."""
