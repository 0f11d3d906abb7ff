"""Operations of a decoder layer other than attention, in torch and in Triton."""
