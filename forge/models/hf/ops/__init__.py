"""The other operations of a decoder layer, in torch and in Triton."""
