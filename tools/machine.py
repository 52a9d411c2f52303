"""What a device and its driver are called in evidence."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from kiln.runtime.cuda import CudaDevice
from kiln.runtime.device import Device


def describe(device: Device) -> tuple[str, str]:
    """(device, driver) names, printable."""
    if isinstance(device, CudaDevice):
        name = (
            bytes(device.driver.call("cuDeviceGetName", 128, device.device))
            .split(b"\0")[0]
            .decode("ascii", "replace")
        )
        cuda = f"CUDA {device.driver_version // 1000}.{device.driver_version % 1000 // 10}"
        version = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", _text("/proc/driver/nvidia/version"))
        return name.strip(), f"{version[1]}, {cuda}" if version else cuda
    model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return name.encode("ascii", "replace").decode(), f"{platform.system()} {platform.release()}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""
