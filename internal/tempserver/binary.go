//go:build unix

package tempserver

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// Flavour says whose server a binary is.
type Flavour string

// The flavours that [Find] tells apart. MySQL includes close relatives, such
// as Percona Server.
const (
	MySQL   Flavour = "MySQL"
	MariaDB Flavour = "MariaDB"
)

// Binary is a server program on this machine. Get one from [Find].
type Binary struct {
	Name    string // what tests call it: "MySQL", "MariaDB", or with the version where there are several, "MariaDB 11.8"
	Flavour Flavour
	Path    string // the program
	Version string // as the program tells it, such as "9.7.4-2"; "" if it cannot run

	command []string // how to run it: the path, with a loader before it if it needs one
	options []string // what this program needs wherever its files lie
	err     error    // why it cannot run; Start returns it
	clock   string   // the library by which its clock is set; "" where it is the machine's
	running *Server  // in place of a program: the server that MYSQLLOCK_TEST_DSN names
}

// String returns the flavour and the version: "MySQL 9.7.4-2".
func (b Binary) String() string {
	return strings.TrimSpace(string(b.Flavour) + " " + b.Version)
}

// Find returns the servers of this machine, MySQL before MariaDB, each program
// once. It searches MYSQL_ROOT (/opt/mysql97 if unset), PATH and the usual
// folders beside it, then MARIADB_ROOT (/opt/mariadb118 if unset) unless
// MYSQLLOCK_MARIADB118 is 0, and asks each program what it is: a mysqld can be
// MariaDB. MYSQLLOCK_MYSQLD and MYSQLLOCK_MARIADBD name a program in place of the
// search for that flavour; one that cannot run is listed too, so that [Start]
// says why.
func Find() []Binary {
	var found []Binary
	here := search()
	for _, wanted := range []struct {
		flavour Flavour
		env     string
	}{
		{MySQL, "MYSQLLOCK_MYSQLD"},
		{MariaDB, "MYSQLLOCK_MARIADBD"},
	} {
		if path := os.Getenv(wanted.env); path != "" {
			b := inspect(path)
			if b.err == nil && b.Flavour != wanted.flavour {
				b.err = fmt.Errorf("%s is %s, not %s", path, b.Flavour, wanted.flavour)
			}
			if b.err != nil {
				b.err = fmt.Errorf("tempserver: %s: %w", wanted.env, b.err)
			}
			b.Flavour = wanted.flavour
			b.Name = string(b.Flavour)
			found = append(found, b)
			continue
		}
		first := len(found)
		for _, b := range here {
			if b.Flavour != wanted.flavour {
				continue
			}
			b.Name = string(b.Flavour)
			if len(found) > first {
				b.Name += " " + release.FindString(b.Version)
			}
			found = append(found, b)
		}
	}
	return found
}

// EachFlavour returns the first server of each flavour among those that [Find] or
// [Require] returned. It is for tests that take long and learn little from another
// version of the same flavour, and for programs that only show something.
func EachFlavour(found []Binary) []Binary {
	return slices.CompactFunc(slices.Clone(found), func(a, b Binary) bool { return a.Flavour == b.Flavour })
}

// release is what of a version tells the servers of a flavour apart.
var release = regexp.MustCompile(`^[0-9]+\.[0-9]+`)

// search returns the servers in the places where they usually are.
func search() []Binary {
	root := cmp.Or(os.Getenv("MYSQL_ROOT"), "/opt/mysql97")
	folders := []string{filepath.Join(root, "usr/sbin")}
	folders = append(folders, filepath.SplitList(os.Getenv("PATH"))...)
	// Where distributions put servers; often not on an ordinary user's PATH.
	folders = append(folders, "/usr/sbin", "/usr/local/sbin", "/usr/libexec")
	if wantMariaDB118() {
		folders = append(folders, filepath.Join(cmp.Or(os.Getenv("MARIADB_ROOT"), "/opt/mariadb118"), "usr/sbin"))
	}

	var found []Binary
	seen := make(map[string]bool)
	for _, folder := range folders {
		for _, name := range []string{"mysqld", "mariadbd"} {
			path, err := filepath.EvalSymlinks(filepath.Join(folder, name))
			if err != nil || !filepath.IsAbs(path) || seen[path] {
				continue
			}
			seen[path] = true
			if b := inspect(path); b.err == nil {
				found = append(found, b)
			}
		}
	}
	return found
}

// wantMariaDB118 reports whether MariaDB 11.8 is wanted beside another MariaDB.
func wantMariaDB118() bool { return os.Getenv("MYSQLLOCK_MARIADB118") != "0" }

// inspected are the programs that have been asked, by their paths. Each test looks
// for the servers, and their answers take a tenth of a second.
var inspected sync.Map

// inspect tells what the program at path is. It is asked once.
func inspect(path string) Binary {
	if b, known := inspected.Load(path); known {
		return b.(Binary)
	}
	b := ask(path)
	if b.err == nil {
		inspected.Store(path, b)
	}
	return b
}

var versionPattern = regexp.MustCompile(`\bVer (\S+)`)

// ask asks the program at path what it is.
func ask(path string) Binary {
	b := Binary{Path: path}
	if b.Path, b.err = exec.LookPath(path); b.err != nil {
		return b
	}
	if b.Path, b.err = filepath.EvalSymlinks(b.Path); b.err != nil {
		return b
	}
	b.command = []string{b.Path}
	if root, ok := strings.CutSuffix(filepath.Dir(b.Path), "/usr/sbin"); ok && root != "" {
		b.runUnder(root)
	}
	args := slices.Concat(b.command[1:], []string{"--no-defaults", "--version"})
	out, err := exec.Command(b.command[0], args...).CombinedOutput()
	match := versionPattern.FindSubmatch(out)
	switch {
	case err != nil:
		b.err = fmt.Errorf("%s --version: %w: %s", path, err, out)
	case match == nil:
		b.err = fmt.Errorf("%s --version: not a server: %s", path, out)
	case strings.Contains(string(out), "MariaDB"):
		b.Flavour = MariaDB
		b.Version, _, _ = strings.Cut(string(match[1]), "-MariaDB")
	default:
		b.Flavour = MySQL
		b.Version = string(match[1])
		// The built-in folder may be missing, which is fatal; no folder is not.
		b.options = append(b.options, "--secure-file-priv=NULL")
	}
	return b
}

// runUnder makes b run with the loader, the libraries and the data that lie
// with it below root: it comes from another release of the distribution and
// would not run with this system's. Without a loader there, b stays as it is.
func (b *Binary) runUnder(root string) {
	loaders, _ := filepath.Glob(filepath.Join(root, "usr/lib/*/ld-linux*.so.*"))
	if len(loaders) == 0 {
		return
	}
	libraries := []string{
		filepath.Dir(loaders[0]),
		filepath.Join(root, "usr/lib/mysql"),
		filepath.Join(root, "usr/lib/mysql/private"),
	}
	share := filepath.Join(root, "usr/share/mysql")
	if newer := filepath.Join(root, "usr/share/mariadb"); exists(newer) {
		share = newer
	}
	b.command = []string{loaders[0], "--library-path", strings.Join(libraries, ":"), b.Path}
	b.options = []string{
		"--basedir=" + filepath.Join(root, "usr"),
		"--lc-messages-dir=" + share,
		"--character-sets-dir=" + filepath.Join(share, "charsets"),
		"--plugin-dir=" + filepath.Join(root, "usr/lib/mysql/plugin"),
	}
}

// exists reports whether there is a file at path.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// TB is what [Require], [Share] and [Database] need of a testing.TB.
type TB interface {
	Helper()
	Cleanup(func())
	Logf(format string, args ...any)
	Fatal(args ...any)
	Skip(args ...any)
}

// Require returns what [Find] found, at least one server, for a test to run
// on each; or those that the environment asks for, see [ForTests]. A flavour that is missing
// is worth a line in the test's log, both missing end the test as skipped. With CI=true
// in the environment any missing flavour ends the test as failed, and so does MariaDB
// 11.8 where it is wanted (see [Find]) and MYSQLLOCK_MARIADBD does not name the only
// MariaDB.
func Require(tb TB) []Binary {
	tb.Helper()
	if without(tb) {
		return nil
	}
	found, err := ForTests()
	if err != nil {
		tb.Fatal(err)
		return nil
	}
	if os.Getenv(testDSN) == "" && (os.Getenv(testServers) == "" || len(found) == 0) {
		check(tb, found)
	}
	return found
}

// RequireOld returns the MariaDB 10.5 in MARIADB105_ROOT (/opt/mariadb105 if unset), which
// [Find] leaves out: few tests need it. If it is missing, the test ends as [Require] would
// end it. It is also skipped if the environment asks for certain servers.
func RequireOld(tb TB) Binary {
	tb.Helper()
	if asked := cmp.Or(os.Getenv(testDSN), os.Getenv(testServers)); asked != "" {
		tb.Skip("tempserver: it takes MariaDB 10.5, and the environment asks for other servers: " + asked)
	}
	b := inspect(filepath.Join(cmp.Or(os.Getenv("MARIADB105_ROOT"), "/opt/mariadb105"), "usr/sbin/mariadbd"))
	if b.err != nil {
		err := fmt.Errorf("no MariaDB 10.5 on this machine; scripts/install-servers.sh installs it: %w", b.err)
		if os.Getenv("CI") == "true" {
			tb.Fatal(err)
		}
		tb.Skip(err)
	}
	return b
}

// check ends the test if too little was found.
func check(tb TB, found []Binary) {
	tb.Helper()
	for _, flavour := range []Flavour{MySQL, MariaDB} {
		if slices.ContainsFunc(found, func(b Binary) bool { return b.Flavour == flavour }) {
			continue
		}
		err := fmt.Errorf("no %s server on this machine; scripts/install-servers.sh installs one", flavour)
		switch {
		case os.Getenv("CI") == "true":
			tb.Fatal(err)
			return
		case len(found) == 0:
			tb.Skip(errors.New("no MySQL or MariaDB server on this machine; scripts/install-servers.sh installs both"))
		default:
			tb.Logf("%v", err)
		}
	}
	newest := func(b Binary) bool { return b.Flavour == MariaDB && strings.HasPrefix(b.Version, "11.8.") }
	if os.Getenv("CI") == "true" && wantMariaDB118() && os.Getenv("MYSQLLOCK_MARIADBD") == "" && !slices.ContainsFunc(found, newest) {
		tb.Fatal(errors.New("no MariaDB 11.8 on this machine; scripts/install-servers.sh installs it, and MYSQLLOCK_MARIADB118=0 does without"))
	}
}
