"""The machine and the versions that a report is about, as a Markdown table."""

import platform

import torch
import triton

from report_tables import markdown_table
from titan_relay.units import in_gib


def main() -> None:
    lines = [
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("triton", triton.__version__),
        ("CUDA of torch", torch.version.cuda or "none"),
    ]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        text = (
            f"{device.name}, capability {device.major}.{device.minor}, "
            f"{device.multi_processor_count} multiprocessors, "
            f"{in_gib(device.total_memory, 1)}"
        )
        lines.append((f"device {index}", text))
    print(markdown_table(["", ""], lines))


if __name__ == "__main__":
    main()
