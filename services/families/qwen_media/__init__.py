"""Media as Qwen's thinkers take them: features of encoders, their places in a prompt, M-RoPE positions."""
