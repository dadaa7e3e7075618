"""The same with collective matmuls: products run block by block while what they need goes round the devices."""

from beside_one_device import compare

compare(axes={"tensor": 8}, collective_matmul="one-way")
