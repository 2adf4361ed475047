"""What the stages share and the gateway must not import: torch, vLLM, the stage loop."""
