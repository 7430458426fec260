package server_test

import (
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/fakeserver"
	"github.com/mysqllock/mysqllock/internal/server"
)

// TestWaitsAreReadFromTextsOfTheServer as it shows them: whole, or cut off.
func TestWaitsAreReadFromTextsOfTheServer(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"SELECT /* mysqllock waits 20 ms */ GET_LOCK('a', 1)":                 20 * time.Millisecond,
		"/* mysqllock 12ab waits 0 ms */ CALL p()":                            0,
		"/* mysqllock 12ab */ SELECT 1 /* mysqllock 12ab waits 20 ms */":      20 * time.Millisecond,
		"/* mysqllock 12ab waits 20":                                          -1,
		"/* mysqllock 12ab waits 9999999999999 ms */":                         -1,
		"SELECT ' waits 20 ms */'":                                            -1,
		"/* another program waits 5 ms */ SELECT /* mysqllock waits 20 ms */": 20 * time.Millisecond,
	} {
		if got, ok := server.ReadWaits(text); ok != (want >= 0) || ok && got != want {
			t.Errorf("%s: %v, %v", text, got, ok)
		}
	}
}

// TestWordsOfEnginesAreWhole: a build whose name has an engine's in it is no such engine.
func TestWordsOfEnginesAreWhole(t *testing.T) {
	for comment, foreign := range map[string]bool{
		"our tidbits": false, "mytidb": false, "tidbits of TiDB": true, "(tidb)": true, "Git revision 5": false, "Version: 24 (Git revision 5 branch 'main')": true,
	} {
		info, _, err := probeAs(t, fakeserver.Engine{Version: "8.0.33", Comment: comment})
		if err == nil && (info.Tablets || info.Optimists) != foreign {
			t.Errorf("%q is taken for %s", comment, info.Engine)
		}
	}
}
