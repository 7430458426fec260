package mysqllockvet_test

import (
	"testing"

	"golang.org/x/tools/go/analysis/analysistest"

	"github.com/mysqllock/mysqllock/mysqllockvet"
)

// TestAnalyzer runs the analyzer over the packages under testdata, whose comments say
// what it has to report; that it reports nothing else is a part of the test.
func TestAnalyzer(t *testing.T) {
	analysistest.Run(t, analysistest.TestData(), mysqllockvet.Analyzer, "plain", "helpers", "held", "orm", "misuse", "options", "removed", "handles", "resolver", "loaded")
}
