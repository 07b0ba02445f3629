"""Membership and discovery of a swarm, usable without the rest of swarm-node."""
