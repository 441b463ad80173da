"""Asyncio-native checkpoints for PyTorch."""
