"""Vision-language policies: preparation of images for prompts, and execution of vision towers."""
