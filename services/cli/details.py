"""What the services say about schedules and inputs, in Chinese. A detail that is not known here stays as it came."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

FIELDS: Final = {
    "second": "秒",
    "minute": "分",
    "hour": "时",
    "day of month": "日",
    "month": "月",
    "day of week": "星期",
    "expression": "表达式",
    "timezone": "时区",
}
"""Parts of a schedule expression."""

_PART: Final = re.compile(r"(?:(?<=^)|(?<=\())(?:" + "|".join(FIELDS) + r")(?=\)|$)")

_SAID: Final = tuple(
    (re.compile(english), chinese)
    for english, chinese in (
        # Where the system is.
        (r"Write http://host:port or https://host\.", "请写 http://host:port 或 https://host。"),
        (r"QL3_URL is set without a credential\.", "设置了 QL3_URL，但没有凭据。"),
        (r"This is no credential; give it as it was issued\.", "这不是凭据；请按签发的原样给出。"),
        (
            r"ql3 is not running on (.+): start it with ql3 up, or name it with --data\.",
            r"ql3 没有在 \1 上运行：请用 ql3 up 启动，或用 --data 指定。",
        ),
        (r"The gateway cannot be reached \((\w+)\)\.", r"无法连接网关（\1）。"),
        # The expression as a whole.
        (r"It has (\d+) characters; at most (\d+) are read\.", r"它有 \1 个字符；最多读取 \2 个。"),
        (
            r"Only ASCII letters, digits, signs and blanks are read; write it on one line\.",
            "只读取 ASCII 字母、数字、符号和空格；请写在一行。",
        ),
        (
            r"It is empty; write five fields such as (`.+?`), or a macro such as @daily\.",
            r"它是空的；请写五个字段，如 \1，或 @daily 这样的宏。",
        ),
        (
            r"It has (\d+) fields; write five, or six with leading seconds\."
            r"(?: A year field is not known: give the trigger a start and an end date\.)",
            r"它有 \1 个字段；请写五个，或以秒开头的六个。没有年份字段：请给触发器设置开始和结束时间。",
        ),
        (
            r"It has (\d+) fields; write five, or six with leading seconds\.",
            r"它有 \1 个字段；请写五个，或以秒开头的六个。",
        ),
        (
            r"The time zone is not part of the expression; give it as the trigger's time zone\.",
            "时区不属于表达式；请作为触发器的时区给出。",
        ),
        (r"(`rate\(…\)`) is of another dialect; write (`.+`)\.", r"\1 属于另一种写法；请写 \2。"),
        (
            r"(`cron\(…\)`) is of another dialect; write its fields without the year and with `\*`\.",
            r"\1 属于另一种写法；请只写各字段，不带年份，并用 `*`。",
        ),
        (r"Nothing may follow (`.+`)\.", r"\1 后面不能再有内容。"),
        (r"(`.+`) is not known here; write `@boot`\.", r"这里没有 \1；请写 `@boot`。"),
        (r"There is no macro (`.+`); known are (.+)\.", r"没有宏 \1；可用的有 \2。"),
        (r"Its fields do not make a schedule\.", "这些字段不构成时间表。"),
        (
            r"Write a distance in d, h, m and s, in this order: (`.+?`), (`.+?`)\.",
            r"请按 d、h、m、s 的顺序写间隔：\1、\2。",
        ),
        (r"Write a whole second with its offset: (`.+`)\.", r"请写带偏移的整秒：\1。"),
        (r"The distance is from 1 second to 100 years\.", "间隔从 1 秒到 100 年。"),
        # One field.
        (
            r"(`.+`) is of another dialect; write (`H`), or (`.+`) for a part of the range\.",
            r"\1 属于另一种写法；请写 \2，或用 \3 取一部分范围。",
        ),
        (r"(`.+`) is of another dialect; write (`.+`)\.", r"\1 属于另一种写法；请写 \2。"),
        (r"Ranges are written with one hyphen: (`.+`)\.", r"范围用一个连字符：\1。"),
        (
            r"`R` would change at every start; write `H`, which spreads and stays\.",
            "`R` 每次启动都会变；请写 `H`，它分散且固定。",
        ),
        (r"A list has an empty item; remove the extra comma\.", "列表中有空项；请去掉多余的逗号。"),
        (
            r"Plain weekdays and `#` or `L` do not mix; write two triggers\.",
            "普通星期与 `#` 或 `L` 不能混用；请写两个触发器。",
        ),
        (r"`H` stands alone in its field: (.+)\.", r"`H` 在字段中须单独出现：\1。"),
        (r"(`H\(a-b\)`) needs (.+)\.", r"\1 要求 \2。"),
        (r"A step of 0 never moves; write 1 or more\.", "步长 0 不会前进；请写 1 或更大。"),
        (r"`W` follows a day from 1 to 31, as in `15W`\.", "`W` 跟在 1 到 31 的日期之后，如 `15W`。"),
        (r"`W` stands alone in its field; write two triggers\.", "`W` 在字段中须单独出现；请写两个触发器。"),
        (
            r"`LW` is not known; `L` is the last day of the month, `31W` its last working day\.",
            "没有 `LW`；`L` 是当月最后一天，`31W` 是当月最后一个工作日。",
        ),
        (
            r"Days before the last are not known; `L` is the last day of the month\.",
            "不支持倒数第几天；`L` 是当月最后一天。",
        ),
        (r"The last weekday of a month is written `L` first: (`.+`)\.", r"当月最后一个星期几把 `L` 写在前面：\1。"),
        (
            r"`#` stands between a weekday and a number from 1 to 5, as in `mon#2`\.",
            "`#` 写在星期与 1 到 5 的数字之间，如 `mon#2`。",
        ),
        (r"A step follows a range; write (`.+`)\.", r"步长跟在范围之后；请写 \1。"),
        (
            r"(`.+?`) is not a value, range or step; write such as `5`, `1-5`, `\*/10`\.",
            r"\1 不是值、范围或步长；请写如 `5`、`1-5`、`*/10`。",
        ),
        (
            r"`\*` stands alone in its field, since it already means every value\.",
            "`*` 已表示所有值，在字段中须单独出现。",
        ),
        (
            r"What this trigger starts, or who may, changes all the time\.",
            "该触发器启动的任务或其权限一直在变动。",
        ),
        (
            r"A range that goes over the end takes no step; write its values as a list\.",
            "跨过末尾的范围不能带步长；请把值写成列表。",
        ),
        (
            r"From (`.+?`) to itself is one value to some crons and every value to others; write (`.+`)\.",
            r"从 \1 到它自身，有的 cron 理解为一个值，有的理解为所有值；请写 \2。",
        ),
        (
            r"(\d+) is out of range; write (\d+) to (\d+)\. Midnight is hour 0\.",
            r"\1 超出范围；请写 \2 到 \3。午夜是 0 时。",
        ),
        (
            r"(\d+) is out of range; write (\d+) to (\d+)\. The full one is 0\.",
            r"\1 超出范围；请写 \2 到 \3。整点或整分是 0。",
        ),
        (r"(\d+) is out of range; write (\d+) to (\d+)\.", r"\1 超出范围；请写 \2 到 \3。"),
        (r"(`.+`) is written short: (`.+`)\.", r"\1 请写缩写：\2。"),
        (r"(`.+`) is not known; write (\d+) to (\d+), or (\w+) to (\w+)\.", r"不认识 \1；请写 \2 到 \3，或 \4 到 \5。"),
        (r"(`.+`) is not known; write (\d+) to (\d+)\.", r"不认识 \1；请写 \2 到 \3。"),
        (r"No such day exists in the months of this expression\.", "该表达式的月份里没有这一天。"),
        # Zones and instants.
        (r"(`.+`) is not an IANA zone; a fixed offset is written (.+)\.", r"\1 不是 IANA 时区；固定偏移写作 \2。"),
        (r"(`.+`) is not an IANA zone; it is written (.+)\.", r"\1 不是 IANA 时区；正确写法是 \2。"),
        (r"(`.+`) is not an IANA zone; perhaps (.+)\.", r"\1 不是 IANA 时区；也许是 \2。"),
        (r"(`.+`) is not an IANA zone\.", r"\1 不是 IANA 时区。"),
        (
            r"write the instant as (\S+), or with an offset such as (\S+)\.",
            r"请写成 \1，或带 \2 这样的偏移。",
        ),
        (r"it is outside of the years (\d+) to (\d+)\.", r"它不在 \1 到 \2 年之间。"),
        (r"write (\d+) to (\d+)\.", r"请写 \1 到 \2。"),
        # Inputs and what else people type into a task.
        (r"'(.+)' is a required property\.", r"缺少必需的输入 '\1'。"),
        (r"(.+) is less than the minimum of (.+)\.", r"\1 小于最小值 \2。"),
        (r"(.+) is greater than the maximum of (.+)\.", r"\1 大于最大值 \2。"),
        (r"(.+) is not of type '(\w+)'\.", r"\1 的类型不是 \2。"),
        (r"(.+) is not one of (.+)\.", r"\1 不在 \2 之中。"),
        (r"Expected `(?:int|float|number)` (<=|>=|<|>) (\S+)\.?", r"数值须 \1 \2。"),
        (r"Expected `str` of length (<=|>=) (\d+)\.?", r"长度须 \1 \2。"),
        (r"There is no such task in this project\.", "该项目中没有此任务。"),
        (r"There is no such trigger in this project\.", "该项目中没有此触发器。"),
        (r"The task is disabled; enable it first\.", "任务已停用；请先启用。"),
        (r"The trigger is disabled; enable it first\.", "触发器已停用；请先启用。"),
        (r"The task would follow itself without end\.", "任务会无尽地跟随自己。"),
        (r"Write an absolute path\.", "请写绝对路径。"),
        (r"It ends before it starts\.", "结束早于开始。"),
        # Triggers and tasks as they are saved.
        (r"A pattern has at most (\d+) characters\.", r"模式最多 \1 个字符。"),
        (
            r"This pattern is not read here: write it without back-references and look-around\.",
            r"不支持此模式：请不要用反向引用和环视。",
        ),
        (r"The task has no such revision\.", r"任务没有此版本。"),
        (r"Write a label as name=value\.", r"标签请写成 name=value。"),
        (r"At most (\d+) tasks follow each other\.", r"最多 \1 个任务依次跟随。"),
        (r"At most (\d+) exclusions; write spans of days instead\.", r"最多 \1 条排除；请改写成日期区间。"),
        (r"A calendar has at most (\d+) (?:characters|bytes)\.", r"日历最多 \1 个字符。"),
        (
            r"At most (\d+) items of public holidays; write other days as dates\.",
            r"公众假日最多 \1 项；其他日子请写成日期。",
        ),
        (r"A calendar has at most (\d+) lines\.", r"日历最多 \1 行。"),
        (
            r"The rules of the calendar take too long to follow; begin them later, or write days and spans\.",
            r"日历的重复规则计算太久；请让它们晚些开始，或改写成日期和区间。",
        ),
        (
            r"A time zone of the calendar has rules that are not read here; name a zone as Europe/Berlin\.",
            r"不支持日历中自带时区的规则；请写时区名称，如 Europe/Berlin。",
        ),
        (
            r"A rule of the calendar repeats within a day; write FREQ=DAILY, WEEKLY, MONTHLY or YEARLY\.",
            r"日历的规则在一天之内重复；请写 FREQ=DAILY、WEEKLY、MONTHLY 或 YEARLY。",
        ),
        (r"The calendar has no event\.", r"日历中没有事件。"),
        (
            r"This is not an exclusion: write (.+), two instants or holidays:DE\.",
            r"这不是排除项：请写 \1、两个时刻，或 holidays:CN。",
        ),
        (r"This is not an exclusion: (.+)\.", r"这不是排除项：\1。"),
        (r"The calendar cannot be read as iCalendar\.", r"无法按 iCalendar 读取该日历。"),
        (r"The task stands there twice\.", r"该任务出现了两次。"),
        (r"Somebody made the same task meanwhile\.", r"期间有人创建了同一任务。"),
        (r"A payload has at most (\d+) bytes\.", r"载荷最多 \1 字节。"),
        (r"The window ends before it begins\.", r"时间窗的结束早于开始。"),
        (
            r"A backfill is for what has passed; later instants come by themselves\.",
            r"补跑只针对过去；以后的时刻会自行到来。",
        ),
        (r"The window is at most ten years wide\.", r"时间窗最宽十年。"),
        (r"The task is disabled\.", r"任务已停用。"),
        (r"The trigger is disabled\.", r"触发器已停用。"),
        (r"This webhook takes signed calls only\.", r"此 webhook 只接受带签名的请求。"),
        (r"More than (\d+) runs; choose a smaller window\.", r"超过 \1 次运行；请选小一些的时间窗。"),
        (r"At most (\d+) bytes\.", r"最多 \1 字节。"),
        (r"Inputs are an object: write (`.+`) with (`.+`)\.", r"输入是一个对象：请写 \1 和 \2。"),
        (r"Inputs have at most (\d+) bytes\.", r"输入最多 \1 字节。"),
        (r"It is not a JSON Schema: (.+)\.", r"它不是 JSON Schema：\1。"),
        (r"It is nested too deeply\.", r"嵌套过深。"),
        (r"References stay inside the schema: (`.+`)\.", r"引用只能在该 schema 之内：\1。"),
        (r"(`.+`) is not read here\.", r"这里不支持 \1。"),
        (r"Checking it takes too many steps\.", r"检查它所需的步骤过多。"),
        (r"The task's schema cannot be applied \((.+)\)\.", r"无法应用任务的 schema(\1)。"),
        (r"Keys that begin with (\S+) are ours\.", r"以 \1 开头的键由系统保留。"),
        (r"The dispatcher did not answer for this run\.", r"dispatcher 没有对此次运行作出答复。"),
        (r"The task has no such trigger\.", r"任务没有此触发器。"),
        (r"There is no such trigger\.", r"没有此触发器。"),
        (r"Only a trigger of kind `manual` is run by people\.", r"只有 `manual` 类型的触发器可由人运行。"),
        (r"A webhook is made alone, with the digest of its secret\.", r"webhook 须单独创建，并带密钥的摘要。"),
        (r"The project has more secrets than are looked through\.", r"项目的密文多于可查看的数量。"),
        (r"(`\w+`) takes no limit\.", r"\1 不带上限。"),
        (r"The base is longer than the maximum\.", r"基数大于上限。"),
        (r"A key stands there twice\.", r"某个键出现了两次。"),
        (r"The program's name is empty\.", r"程序名为空。"),
        (r"The command has (\d+) bytes; at most (\d+) are taken\.", r"命令有 \1 字节；最多 \2 字节。"),
        (r"At most (\d+) secrets\.", r"最多 \1 个密文。"),
        (r"The task has (\d+) bytes; at most (\d+) are taken\.", r"任务有 \1 字节；最多 \2 字节。"),
        (r"An argument cannot hold a NUL\.", r"参数中不能有 NUL。"),
        (r"One argument has at most (\d+) bytes\.", r"单个参数最多 \1 字节。"),
        (r"The variable stands there twice\.", r"该变量出现了两次。"),
        (r"Names that begin with (\S+) are ours\.", r"以 \1 开头的名称由系统保留。"),
        (r"Give either a value or a secret\.", r"请给出值或密文，二者之一。"),
        (r"A value cannot hold a NUL\.", r"值中不能有 NUL。"),
        (
            r"The kernel takes at most (\d+) bytes of name and value together, this has (\d+); "
            r"deliver it as a file \((`.+`)\)\.",
            r"内核允许名称与值合计最多 \1 字节，这里有 \2；请改为文件传递(\3)。",
        ),
        (r"It cannot be stored: (.+)\.", r"无法保存：\1。"),
        (r"It holds a lone surrogate\.", r"其中有不成对的代理字符。"),
        (r"A task has at most (\d+) triggers\.", r"一个任务最多 \1 个触发器。"),
        (r"A webhook stays one, and nothing else becomes one\.", r"webhook 不能变成别的类型，别的也不能变成 webhook。"),
        (r"Only a webhook has a secret\.", r"只有 webhook 有密钥。"),
        (r"A trigger of kind (`\w+`) needs an expression\.", r"\1 类型的触发器需要表达式。"),
        (r"A trigger of kind (`\w+`) takes no expression\.", r"\1 类型的触发器不带表达式。"),
        (r"A trigger of kind (`\w+`) takes no instant\.", r"\1 类型的触发器不带时刻。"),
        (r"A trigger of kind (`\w+`) has no instants\.", r"\1 类型的触发器没有时刻。"),
        (r"A trigger of kind (`\w+`) has no calendar to exclude from\.", r"\1 类型的触发器没有可排除的日历。"),
        (r"Instants are whole seconds\.", r"时刻须为整秒。"),
        (r"(`catch_up`) is given with (`.+`), and only then\.", r"\1 只能与 \2 一起给出，且必须给出。"),
        (
            r"(`after_task`) is given with the kind of this name, and only then\.",
            r"\1 只能与同名类型一起给出，且必须给出。",
        ),
        (r"Only a trigger of kind (`once`) has an instant\.", r"只有 \1 类型的触发器有时刻。"),
        (r"Calendar fields are a trigger of kind (`cron`)\.", r"日历字段属于 \1 类型的触发器。"),
        (r"Give the instant\.", r"请给出时刻。"),
        (r"Give the instant once, with kind (`once`)\.", r"时刻只给一次，类型为 \1。"),
        (r"(`@\w+`) is a trigger of kind (`\w+`)\.", r"\1 是 \2 类型的触发器。"),
        (r"Write a time before the year 3000\.", r"请写 3000 年之前的时间。"),
        (r"Write a time from 1970 on and before the year 3000\.", r"请写 1970 年起、3000 年之前的时间。"),
        (r"Nothing would change: name what is to be another way\.", r"没有变化：请指明要改什么。"),
        (r"The task that is to run is changed all the time\.", "要运行的任务一直在变动。"),
        (r"The file cannot be read: (.+)\.", r"无法读取文件：\1。"),
        (r"(.+) does not match (.+)\.", r"\1 不符合 \2。"),
        (
            r"Use lower-case letters, digits and hyphens, 1 to 63, beginning with a letter or a digit\.",
            r"请用小写字母、数字和连字符，1 到 63 个，以字母或数字开头。",
        ),
    )
)


_USAGE: Final = tuple(
    (re.compile(english), chinese)
    for english, chinese in (
        (r"Missing argument (.+)\.", r"缺少参数 \1。"),
        (r"Missing option (.+)\.", r"缺少选项 \1。"),
        (r"Missing command\.", "缺少子命令。"),
        (r"No such option: (\S+?)\.? Did you mean (.+)\?", r"没有选项 \1；是否想写 \2？"),
        (r"No such option: (\S+?)\.? \(Possible options: (.+)\)", r"没有选项 \1；可能是 \2。"),
        (r"No such option: (\S+?)\.?", r"没有选项 \1。"),
        (r"No such command (.+?)\.(?: Did you mean (.+)\?)", r"没有命令 \1；是否想写 \2？"),
        (r"No such command (.+)\.", r"没有命令 \1。"),
        (r"Got unexpected extra argument(?:s|\(s\))? \((.+)\)", r"多出了参数 \1。"),
        (r"Option (.+) requires an argument\.", r"选项 \1 需要一个值。"),
        (r"Option (.+) does not take a value\.", r"选项 \1 不带值。"),
        (r"(.+) is not a valid (?:int|integer|float|number|int range|integer range)\.", r"\1 不是有效的数字。"),
        (r"(.+) is not in the range (.+)\.", r"\1 不在范围 \2 之内。"),
        (r"(.+) is not one of (.+)\.", r"\1 不在 \2 之中。"),
        (r"(?:Path|File|Directory) (.+) does not exist\.", r"\1 不存在。"),
    )
)
_INVALID = re.compile(r"Invalid value(?: for (.+?))?: (.+)", re.DOTALL)


def usage(message: str) -> str:
    """What the command line's reader says about what was typed, in Chinese where it is known here."""
    if (found := _INVALID.fullmatch(message)) is not None:
        where = f"{found[1]} 的值无效：" if found[1] else "值无效："
        return where + usage(found[2])
    return _told(_USAGE, message) or message


def field(name: str) -> str:
    """A field's name, with that of a part of a schedule expression in Chinese: `--cron (日)`."""
    return _PART.sub(lambda found: FIELDS[found[0]], name)


def chinese(detail: str) -> str | None:
    """A detail in Chinese, or None when it is not known here."""
    return _told(_SAID, detail)


def _told(table: Sequence[tuple[re.Pattern[str], str]], english: str) -> str | None:
    for pattern, text in table:
        if (found := pattern.fullmatch(english)) is not None:
            return found.expand(text)
    return None
