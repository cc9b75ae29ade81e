"""FP8 with block scales: quantization, products, and linear layers of them."""
