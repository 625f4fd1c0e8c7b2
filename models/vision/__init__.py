"""Vision-language policies: preparation of images for prompts, and forward passes of vision towers."""
