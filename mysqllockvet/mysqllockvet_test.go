package mysqllockvet_test

import (
	"testing"

	"golang.org/x/tools/go/analysis/analysistest"

	"github.com/mysqllock/mysqllock/mysqllockvet"
)

// TestTheAnalyzerReportsWhatIsWrongAndNothingElse: the comments of the packages under testdata
// say what it has to report.
func TestTheAnalyzerReportsWhatIsWrongAndNothingElse(t *testing.T) {
	analysistest.Run(t, analysistest.TestData(), mysqllockvet.Analyzer, "plain", "helpers", "held", "orm", "misuse", "options", "removed", "handles", "resolver", "loaded")
}
