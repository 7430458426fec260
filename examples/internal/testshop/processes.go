package testshop

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
)

// envWork has what a process is to do, in JSON: the arguments of work.
const envWork = "TESTSHOP_WORK"

// Main runs the tests, or work in a process that Processes has started. What work prints on the
// standard output is what Processes returns of it.
func Main(m *testing.M, work func(args ...string) error) {
	told, worker := os.LookupEnv(envWork)
	if !worker {
		os.Exit(m.Run())
	}
	var args []string
	err := json.Unmarshal([]byte(told), &args)
	if err == nil {
		err = work(args...)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Processes runs this test program n times at once, each with the same work, and returns what each
// has printed. Of a process that fails it tells the test.
func Processes(t *testing.T, n int, args ...string) []string {
	t.Helper()
	told, err := json.Marshal(args)
	if err != nil {
		t.Fatal(err)
	}
	printed := make([]string, n)
	var all sync.WaitGroup
	for i := range printed {
		all.Go(func() {
			var out, said bytes.Buffer
			cmd := exec.CommandContext(t.Context(), os.Args[0])
			cmd.Env = append(os.Environ(), envWork+"="+string(told))
			cmd.Stdout, cmd.Stderr = &out, &said
			if err := cmd.Run(); err != nil {
				t.Errorf("process %d: %v: %s", i+1, err, said.String())
			}
			printed[i] = out.String()
		})
	}
	all.Wait()
	return printed
}
