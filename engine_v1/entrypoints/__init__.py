"""How users reach the engine: the LLM class and the command line."""
