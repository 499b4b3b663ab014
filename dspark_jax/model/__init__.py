"""The mathematics: pure functions of weights, values and caches."""
