"""A namenode and a datanode of Hadoop 2.7.3 on this machine's loopback."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

from qfleet.system.descendants import die_with_parent
from tests.datasets.stores.hadoop_jars import hadoop_jars

START_SECONDS = 120
NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
JAVA = ("java", "-Xmx192m", "-XX:+UseSerialGC", "--add-opens=java.base/java.lang=ALL-UNNAMED")
LOG = """log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
"""


@dataclass
class HdfsCluster:
    """One HDFS, whose servers can be killed and started again; files have blocks of 1 MiB, each on the one datanode."""

    folder: Path
    jars: Path
    ports: list[int]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"hdfs://127.0.0.1:{self.ports[0]}"

    def configure(self) -> None:
        _, http, data, data_http, data_ipc = self.ports
        core = {"fs.defaultFS": self.url, "hadoop.tmp.dir": str(self.folder / "files")}
        hdfs = {
            "dfs.namenode.http-address": f"127.0.0.1:{http}",
            "dfs.namenode.rpc-bind-host": "127.0.0.1",
            "dfs.namenode.safemode.extension": "0",
            "dfs.datanode.address": f"127.0.0.1:{data}",
            "dfs.datanode.http.address": f"127.0.0.1:{data_http}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{data_ipc}",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.webhdfs.enabled": "false",  # its servlets need jars that pyspark does not have
            "dfs.replication": "1",
            "dfs.blocksize": str(1 << 20),
        }
        conf = self.folder / "conf"
        for name in ("webapps/hdfs/WEB-INF", "webapps/datanode/WEB-INF", "webapps/static"):
            (conf / name).mkdir(parents=True)
        for name in ("hdfs", "datanode"):
            (conf / f"webapps/{name}/WEB-INF/web.xml").write_text("<web-app/>")
        (conf / "log4j.properties").write_text(LOG)
        for name, settings in (("core", core), ("hdfs", hdfs)):
            lines = [
                f"<property><name>{key}</name><value>{escape(value)}</value></property>"
                for key, value in settings.items()
            ]
            (conf / f"{name}-site.xml").write_text(f"<configuration>{''.join(lines)}</configuration>")

    def java(self, *words: str) -> list[str]:
        path = ":".join([str(self.folder / "conf"), *sorted(map(str, self.jars.glob("*.jar")))])
        return [*JAVA, "-cp", path, *words]

    def format(self) -> None:
        command = self.java(NAMENODE, "-format", "-nonInteractive")
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    def start(self, server: str) -> None:
        """Start a server, and wait until it listens. It ends with the thread that calls this."""
        log = (self.folder / f"{server.rpartition('.')[2]}.log").open("ab")
        with log:
            self.running[server] = subprocess.Popen(
                self.java(server), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=partial(die_with_parent, parent=os.getpid()),
            )  # fmt: skip
        port = self.ports[0] if server == NAMENODE else self.ports[4]
        wait_until(lambda: self.listens(server, port), f"{server} did not start, see {log.name}")

    def listens(self, server: str, port: int) -> bool:
        assert self.running[server].poll() is None, f"{server} has ended, see {self.folder}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def kill(self, server: str) -> None:
        """End a server at once."""
        process = self.running.pop(server, None)
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(30)

    def wait_until_writable(self) -> None:
        """Wait until the namenode knows its datanode, and has left its safe mode."""
        from qfleet.datasets.storage.hdfs import connect

        def written() -> bool:
            try:
                connect("127.0.0.1", self.ports[0]).pipe_file("/probe", b"written")
            except OSError:
                return False
            return True

        wait_until(written, "HDFS cannot be written to")


def wait_until(condition: object, what: str) -> None:
    limit = time.monotonic() + START_SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < limit, what
        time.sleep(0.2)


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def started_cluster(folder: Path) -> Iterator[HdfsCluster]:
    """A new, empty HDFS; NoHadoop where there is none."""
    cluster = HdfsCluster(folder, hadoop_jars(), free_ports(5))
    cluster.configure()
    cluster.format()
    try:
        cluster.start(NAMENODE)
        cluster.start(DATANODE)
        cluster.wait_until_writable()
        yield cluster
    finally:
        for server in (DATANODE, NAMENODE):
            cluster.kill(server)
