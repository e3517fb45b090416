"""The shop floor: claims jobs, keeps them alive, writes down how they ended. Never runs user code."""
