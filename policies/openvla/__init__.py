"""OpenVLA and OpenVLA-OFT, loaded from their Hugging Face directories."""
