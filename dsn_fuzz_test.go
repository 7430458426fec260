package mysqllock

import (
	"reflect"
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/go-sql-driver/mysql"
)

var lockParameter = regexp.MustCompile(`lock[A-Z]|maxConns|connMax`)

// FuzzDSN makes DSNs of any password and any tail.
func FuzzDSN(f *testing.F) {
	for _, c := range goodDSNs {
		f.Add(password, strings.TrimPrefix(c.dsn, dsnHead))
	}
	for _, c := range badDSNs {
		f.Add("swordfish", strings.TrimPrefix(c.dsn, dsnHead))
	}
	f.Add("sword?lockFish", "shop")
	f.Fuzz(func(t *testing.T, secret, tail string) {
		dsn := "app:" + secret + "@tcp(127.0.0.1:3306)/" + tail
		tellsPassword(t, dsn, secret)
		if !strings.Contains(secret, "/") { // else the password's slash is taken for the one that is missing
			tellsPassword(t, strings.Replace(dsn, ")/", ")", 1), secret)
		}

		plain, cfg, err := splitDSN(dsn) // must not panic
		if lockParameter.MatchString(tail) {
			return
		}
		if err != nil || plain != dsn || !reflect.DeepEqual(cfg, Config{}) {
			t.Errorf("%q has no lock parameters and comes out as %q, %+v, %v", dsn, plain, cfg, err)
		}
		// Lock parameters that are added are taken out again, and no more.
		sep := "?"
		if strings.Contains(dsn[strings.LastIndexByte(dsn, '/'):], "?") {
			sep = "&"
		}
		plain, cfg, err = splitDSN(dsn + sep + "lockOwner=me&lockMaxConns=2")
		if err != nil || plain != dsn || !reflect.DeepEqual(cfg, Config{Owner: "me", LockMaxConns: 2}) {
			t.Errorf("%q with lock parameters comes out as %q, %+v, %v", dsn, plain, cfg, err)
		}
	})
}

// tellsPassword looks for the words of the password in the error.
func tellsPassword(t *testing.T, dsn, secret string) {
	t.Helper()
	_, err := (&Driver{}).OpenConnector(dsn)
	if err == nil {
		return
	}
	// What go-sql-driver/mysql says is not ours to judge: where the DSN is
	// broken, it may take the password for something else.
	if _, plainly := mysql.ParseDSN(dsn); plainly != nil && plainly.Error() == err.Error() && !strings.Contains(err.Error(), "network") {
		return
	}
	rest := strings.Replace(dsn, secret, "", 1)
	for _, word := range strings.FieldsFunc(secret, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) }) {
		if len(word) > 5 && strings.Contains(err.Error(), word) && !strings.Contains(rest, word) && !strings.Contains("mysqllock: DSN parameter", word) {
			t.Errorf("the error of %q tells the password: %v", dsn, err)
		}
	}
}

// TestDSNWithoutAddress: where the address is missing, the password stands where
// go-sql-driver/mysql looks for the network.
func TestDSNWithoutAddress(t *testing.T) {
	for _, dsn := range []string{"root:secretword/db", "root:secretword@/db", "secretword/db?lockWait=1s"} {
		if _, err := (&Driver{}).OpenConnector(dsn); err != nil && strings.Contains(err.Error(), "secretword") {
			t.Errorf("%q: %v", dsn, err)
		}
	}
	if _, err := (&Driver{}).OpenConnector("root:secretword/db"); err == nil || !strings.Contains(err.Error(), "@tcp(") {
		t.Errorf("the error does not say what to do: %v", err)
	}
}
