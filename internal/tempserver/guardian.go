//go:build unix

package tempserver

import (
	"os"
	"os/exec"
	"syscall"
)

// The guardian is a shell that outlives this process, however it ends: its
// standard input is a pipe that ends when the process does, because nobody
// else has the other end. It then kills the server and removes the folder.
//
// No moment between fork and exec is unguarded. The launching shell writes its
// pid, which becomes the server's, and only then looks for the file "alive";
// the guardian removes that file and only then reads the pid. So either the
// guardian sees the pid, or the launcher sees that it is too late.
//
// Before it kills, the guardian looks whether the process works in the folder,
// lest the pid is by now another's. A zombie has no command line.
const (
	guardianScript = `
trap '' HUP INT TERM
read -r line
rm -f "$1/alive"
pid=$(cat "$1/pid")
ours() {
	[ -n "$pid" ] && { cat "/proc/$pid/cmdline" || ps -o args= -p "$pid"; } | grep -qF -e "$1"
}
n=0
while ours "$1" && [ $n -lt 100 ]; do kill -9 "$pid"; sleep 0.05; n=$((n+1)); done
n=0
until rm -rf "$1" || [ $n = 100 ]; do sleep 0.05; n=$((n+1)); done
`
	launchScript = `
echo $$ >"$1/pid" && [ -e "$1/alive" ] || exit
shift
exec "$@"
`
)

// startGuardian starts the guardian of i.dir, which need not be there yet.
func (i *instance) startGuardian() error {
	stdin, leash, err := os.Pipe()
	if err != nil {
		return err
	}
	defer stdin.Close()
	guardian := exec.Command("/bin/sh", "-c", guardianScript, "tempserver-guardian", i.dir)
	guardian.Stdin = stdin
	guardian.Dir = "/"
	guardian.Env = []string{"PATH=" + os.Getenv("PATH") + ":/usr/bin:/bin"}
	guardian.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // what kills our group spares it
	if err := guardian.Start(); err != nil {
		leash.Close()
		return err
	}
	i.guardian, i.leash = guardian, leash
	return nil
}
