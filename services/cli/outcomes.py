"""How a run ended, in Chinese. A summary that is not known here stays as it came."""

from __future__ import annotations

import re
from typing import Final

_ENDS: Final = tuple(
    (re.compile(english), chinese)
    for english, chinese in (
        (r"The process ended with code (-?\d+)\.", r"进程以退出码 \1 结束。"),
        (r"The process was ended by signal (\d+)\.", r"进程被信号 \1 终止。"),
        (r"The run's time was over\.", "运行超时。"),
        (r"The run's time was over before it could be started\.", "还未启动就已超时。"),
        (r"It was not started within its queue time\.", "未在排队时限内启动。"),
        (
            r"The worker stopped renewing its lease; what became of the process is not known\.",
            "节点停止续租；进程的结果未知。",
        ),
        (r"The process is gone and left no exit code\.", "进程已消失，没有留下退出码。"),
        (r"The start was granted too late\.", "启动许可来得太晚。"),
        (r"The start was not granted in time\.", "未及时获得启动许可。"),
        (r"This attempt was started before\.", "此次尝试之前已启动过。"),
        (
            r"The command (.+) \(or what its first line names to run it\) was not found from the folder\s(.+)\.",
            r"从目录 \2 找不到命令 \1（或其首行指定的解释器）。",
        ),
        (
            r"The file of the command (.+) is not executable \(from the folder (.+)\)\.",
            r"命令 \1 的文件不可执行（目录 \2）。",
        ),
        (
            r"The command or its environment holds what no process can be given\.",
            "命令或其环境含有无法交给进程的内容。",
        ),
        (r"The working directory (.+) does not exist or may not be entered\.", r"工作目录 \1 不存在或无法进入。"),
        (
            r"The command's arguments and environment are larger than the kernel takes\.",
            "命令的参数和环境超过了内核允许的大小。",
        ),
        (
            r"The variable (.+) is larger than the kernel takes; use a file\.",
            r"变量 \1 超过了内核允许的大小；请用文件。",
        ),
        (
            r"This worker cannot set the limits that the task requires \((.+)\)\.",
            r"此节点无法设置任务要求的限制（\1）。",
        ),
        (r"The machine allows no more processes\.", "机器不允许更多进程。"),
        (r"The machine has no memory for another process\.", "机器没有内存再启动进程。"),
        (r"It was stopped\.", "已被停止。"),
        (r"It was stopped before it started\.", "启动前已被停止。"),
        (r"The worker was restarted before the start\.", "节点在启动前重启了。"),
        (r"The worker had no process host\.", "节点没有进程宿主。"),
        (r"The process host lost it\.", "进程宿主丢失了它。"),
        (r"There is too little room on the worker's disk\.", "节点的磁盘空间不足。"),
        (r"The worker could not prepare the start\.", "节点无法准备启动。"),
        (r"The run's secrets were not delivered in time\.", "运行的机密未及时送达。"),
        (r"This worker has no container engine\.", "此节点没有容器引擎。"),
        (r"A container takes its packages from its image, and no files\.", "容器的软件包来自其镜像，不接受文件。"),
        (r"An environment of packages belongs to the worker's own user\.", "软件包环境属于节点自己的用户。"),
        (r"A task of the docker executor names an image\.", "docker 执行器的任务须指定镜像。"),
        (r"This worker has no place in memory for a secret file\.", "此节点没有可放机密文件的内存目录。"),
        (r"The worker's place for files belongs to somebody else\.", "节点存放文件的目录属于他人。"),
        (r"The user that the task runs as does not exist on this worker\.", "任务指定的用户在此节点上不存在。"),
        (r"This worker may not run as another user\.", "此节点不能以其他用户身份运行。"),
        (r"The script's inline metadata cannot be read\.", "无法读取脚本的内嵌元数据。"),
        (r"This worker has no (.+), which makes the environment\.", r"此节点没有用于创建环境的 \1。"),
    )
)


def chinese(summary: str) -> str | None:
    """A run's summary in Chinese, or None when it is not known here."""
    for pattern, text in _ENDS:
        if (found := pattern.fullmatch(summary)) is not None:
            return found.expand(text)
    return None
