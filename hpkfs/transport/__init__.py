"""The network edge: one contract, several stores."""
