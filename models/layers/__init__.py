"""The layers that decoders and vision transformers are built from."""
