package main

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// record is all that is known of a run.
type record struct {
	Begun, Ended time.Time
	Machine      machine
	Versions     map[string]string
	Missing      []string
	Proxies      []proxyCheck

	results results
}

// machine is what the run was on. The load is that of everything on it, ours
// included.
type machine struct {
	CPU                   string
	Cores                 int
	Memory                string
	System                string
	LoadBefore, LoadAfter string
}

// libraries are those whose versions matter.
var libraries = []string{
	"github.com/go-sql-driver/mysql", "github.com/go-redsync/redsync/v4", "github.com/bsm/redislock",
	"github.com/redis/go-redis/v9", "go.etcd.io/etcd/client/v3",
}

func newRecord(all servers, missing []string, before string) *record {
	r := &record{Begun: time.Now(), Missing: missing, Versions: map[string]string{"Go": strings.TrimPrefix(runtime.Version(), "go")}}
	for name, s := range all {
		r.Versions[name] = s.version
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if slices.Contains(libraries, m.Path) {
				r.Versions[m.Path] = strings.TrimPrefix(m.Version, "v")
			}
		}
	}
	r.Machine = machine{
		CPU: fromFile("/proc/cpuinfo", `(?m)^model name\s*: (.*)$`), Cores: runtime.NumCPU(),
		Memory: fromFile("/proc/meminfo", `(?m)^MemTotal:\s*(.*)$`), System: system(), LoadBefore: before,
	}
	return r
}

func (r *record) finish() { r.Ended, r.Machine.LoadAfter = time.Now(), load() }

// load is how busy the machine was in the last 1, 5 and 15 minutes.
func load() string { return fromFile("/proc/loadavg", `^(\S+ \S+ \S+)`) }

// busyMachine reports whether more than half of the cores had something to do in the last minute before load.
func busyMachine(load string, cores int) bool {
	first, _, _ := strings.Cut(load, " ")
	lastMinute, err := strconv.ParseFloat(first, 64)
	return err == nil && lastMinute > float64(cores)/2
}

func system() string {
	var name unix.Utsname
	if unix.Uname(&name) != nil {
		return runtime.GOOS
	}
	return unix.ByteSliceToString(name.Sysname[:]) + " " + unix.ByteSliceToString(name.Release[:]) + " " + runtime.GOARCH
}

// fromFile returns what the pattern's group finds; "unknown" where there is none.
func fromFile(path, pattern string) string {
	text, _ := os.ReadFile(path)
	if m := regexp.MustCompile(pattern).FindSubmatch(text); m != nil {
		return string(m[1])
	}
	return "unknown"
}

// write writes the report to dir, and its plots and figures to a folder in it.
func (r *record) write(dir string) error {
	files := filepath.Join(dir, "performance")
	if err := os.MkdirAll(files, 0o755); err != nil {
		return err
	}
	figures, err := r.figures()
	if err != nil {
		return err
	}
	for name, text := range map[string]string{
		filepath.Join(dir, "performance.md"):  r.page(),
		filepath.Join(files, "figures.md"):    r.tables(),
		filepath.Join(files, "results.json"):  figures,
		filepath.Join(files, plotUncontended): r.plotUncontended(),
		filepath.Join(files, plotHot):         r.plotHot(),
		filepath.Join(files, plotHandoff):     r.plotHandoff(),
		filepath.Join(files, plotNear):        r.plotTransaction(0),
		filepath.Join(files, plotFar):         r.plotTransaction(farDelay),
		filepath.Join(files, plotHotRow):      r.plotHotRow(),
	} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// spread is a figure with its quartiles over so many rounds.
type spread struct {
	Median, Q1, Q3 float64
	Rounds         int
}

func (r *record) figures() (string, error) {
	type entry struct {
		label
		Figures map[string]spread
	}
	all := struct {
		*record
		Goals   []outcome
		Results []entry
	}{record: r, Goals: r.goals()}
	for _, l := range r.results.order {
		e := entry{l, make(map[string]spread)}
		for figure, values := range r.results.values[l] {
			e.Figures[figure] = spread{rounded(quantile(values, 0.5)), rounded(quantile(values, 0.25)), rounded(quantile(values, 0.75)), len(values)}
		}
		all.Results = append(all.Results, e)
	}
	var text bytes.Buffer
	out := json.NewEncoder(&text)
	out.SetEscapeHTML(false)
	out.SetIndent("", " ")
	err := out.Encode(all)
	return text.String(), err
}

// rounded keeps five digits.
func rounded(v float64) float64 {
	if v == 0 || math.IsNaN(v) {
		return 0
	}
	scale := math.Pow(10, 4-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}
