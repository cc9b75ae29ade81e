"""Models that see: from the encoded bytes of an image to features among the tokens of a packed pass.

1. `headway.models.images.decoding` reads untrusted bytes into pixels, within limits, or says why not. The image is
   named by a hash of the bytes (`headway.core.images.image_digest`).
2. `headway.models.images.processor` resizes the pixels as the family does, normalizes them and cuts them into patches:
   (P, N) in float32, and a grid (times, rows, columns) with P = times x rows x columns. `merge` x `merge` neighbours
   stand together, in the order in which the tower merges them to one feature.
3. In the token ids, an image is a run of placeholder tokens, one for each feature: `places.expand_placeholders` makes
   such a run of a single placeholder, and says where each begins.
4. `headway.core.images.TokenImages` carries patches, grids and these beginnings in a sample, and in a micro-batch,
   where every image is held once, however many samples show it.
5. `places.packed_positions` derives positions in three axes (M-RoPE) from lengths, grids and beginnings alone, for
   families that have these (`mrope`); `places.packed_ends` the last token of each token's image, where the tokens of
   an image see each other (`headway.models.packed.Spans`).
6. `headway.models.packed.ImageTokens` is all of this for one forward pass: flat patches, grids, the tokens that
   features replace, the feature of each, and positions or spans. `decoder.VisionLM` runs the tower once for all images,
   puts its features in the placeholders' stead, and adds deeper ones after the first layers where a family has those.

A pass without images is that of a text model: `PackedTokens.images` is None, positions have one axis, and neither the
tower nor anything else of this package runs. Families are `VisionFamily` before a family of text models.
"""
