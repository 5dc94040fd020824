"""How speed, energy and the conditions of a measurement are taken and reported."""
